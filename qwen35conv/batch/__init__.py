"""Many conversions: job files, one machine or a cluster, and results that a CI job can show."""
