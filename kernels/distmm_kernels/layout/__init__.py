"""How matrices lie in GPU memory, and the copies that change it."""
