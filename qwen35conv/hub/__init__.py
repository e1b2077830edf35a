"""The Hugging Face Hub: repositories read by byte ranges, and results published."""
