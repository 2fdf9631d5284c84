"""What is computed: one file per way of reading a model. `decoder` takes any uniform decoder."""
