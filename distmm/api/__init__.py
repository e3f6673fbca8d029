"""What users call, in the client's process: operands in, a lazy array, an array that is filled, or a verdict out."""
