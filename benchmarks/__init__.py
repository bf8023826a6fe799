"""How fast Equipoise is on this machine: `python -m benchmarks`. docs/speed.md says what is measured, and how."""
