"""Floor 6: what a pair of models can reach: acceptance of every rule, the optimum, and the fastest tree for a machine.

``pairs.py`` collects the distributions of target and draft at contexts of real text, ``optimum.py`` compares rules on them,
``trees.py`` measures the inputs of the tree search.
"""
