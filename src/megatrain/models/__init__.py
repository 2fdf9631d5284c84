"""What is computed: one file per way of reading a model. `decoder` covers any uniform Hugging Face decoder by capture."""
