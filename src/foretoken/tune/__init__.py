"""Floor 5: what a pair of models could do: acceptance of every rule beside the optimum, and the tree that suits a machine.

``pairs.py`` collects the laws of target and draft at contexts of real text, ``optimum.py`` compares rules on them,
``trees.py`` measures what the shape of a tree needs to know.
"""
