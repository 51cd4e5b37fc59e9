"""Rule tables: which torch tensor is which leaf, read in both directions (the language: `bridge.rules.table`).

table.py         the language, and a table compiled for lookups; patterns.py its name patterns
transforms.py    layout changes with inverses; head_transforms.py, computed_transforms.py those with parameters
plan.py          the steps of a conversion, from names and shapes; planned_reader.py runs them
completeness.py  weights that a table names and a checkpoint lacks
user_file.py     a table in a user's Python file
"""

from easytorch.bridge.rules.table import Rule, Rules, RuleTable, compile_rules

__all__ = ["Rule", "RuleTable", "Rules", "compile_rules"]
