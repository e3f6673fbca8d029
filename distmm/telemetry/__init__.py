"""What is seen of a product while it runs."""
