"""How each method is trained: one file a method, whose RECIPE ``core.builtin`` names."""
