"""Makes the toy: a small world to ask about, its sounds and pictures, and the parts that learn it."""
