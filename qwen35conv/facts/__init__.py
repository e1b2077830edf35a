"""What is stored, as parsed and frozen facts: one header, config.json, the table of names, the whole checkpoint."""
