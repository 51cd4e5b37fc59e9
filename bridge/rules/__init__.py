"""Rule tables: which torch tensor is which leaf, read in both directions (the language: `bridge.rules.table`).

table.py         the language, and a table compiled for look-ups; patterns.py its name patterns
transforms.py    changes of layout, each with its inverse; head_transforms.py, computed_transforms.py those with numbers
plan.py          what a conversion will do, from names and shapes; planned_reader.py carries it out
completeness.py  weights that a table names and a checkpoint lacks
user_file.py     a table in a Python file of the user's
"""

from easytorch.bridge.rules.table import Rule, Rules, RuleTable, compile_rules

__all__ = ["Rule", "RuleTable", "Rules", "compile_rules"]
