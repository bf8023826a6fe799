"""How fast Equipoise is on this machine: `python -m benchmarks`. What is measured and how: docs/speed.md."""
