"""One file a family: modules, weight RULES, sharding plan."""
