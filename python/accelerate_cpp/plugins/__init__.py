"""The objects with which users configure a run: plugins, recipes, keyword handlers, and the names for their fields."""
