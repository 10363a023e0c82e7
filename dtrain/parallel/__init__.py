"""How it is spread: the mesh, the rules that lay parameters over it, and the engines."""
