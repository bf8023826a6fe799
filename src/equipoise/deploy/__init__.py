"""Real clients: the same methods when the data sit on different machines, carried by Flower."""
