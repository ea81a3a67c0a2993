"""What the rooms of the mesh share: types, ports, errors. Imports no room."""
