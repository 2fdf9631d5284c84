"""How bytes move: a step as a program of operations, the waits between them, and their execution on lanes."""
