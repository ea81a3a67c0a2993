"""What the rooms of the mesh say to each other: nouns, ports, errors. Imports no room."""
