"""Expected results: reference products, test matrices, tensor-core arithmetic in NumPy, errors."""
