"""What products should be: reference products, test matrices, tensor-core arithmetic in NumPy, errors."""
