"""What users hand over to configure a run: plugins, recipes, keyword handlers, and the names that their fields take."""
