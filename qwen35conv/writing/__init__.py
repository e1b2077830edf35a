"""The plan carried out: bytes moved, shards journalled, a folder that appears whole or not at all."""
