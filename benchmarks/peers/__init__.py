"""Other libraries at the mlp job: a program for each, and what it takes to run it."""
