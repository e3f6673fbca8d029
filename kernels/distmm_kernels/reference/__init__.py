"""What products are measured against: seeded matrices, and products with twice the digits of float64."""
