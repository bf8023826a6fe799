"""Real sites: the same methods for data that stay on different machines, with Flower as transport."""
