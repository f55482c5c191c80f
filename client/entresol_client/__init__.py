"""The Entresol client: what a GPU host imports to read and write KV blocks."""
