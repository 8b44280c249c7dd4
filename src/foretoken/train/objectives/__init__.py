"""How each method is trained: one ``Objective`` a method, all for the one trainer."""
