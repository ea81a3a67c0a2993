"""Types, ports and errors that the rooms of the mesh share. Imports no room."""
