"""The targets, one module for each room of the product. Every module has `TARGETS`."""
