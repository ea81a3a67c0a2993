"""How code that nobody vouches for is run: cells, limits, system call filters, environments, wheels."""
