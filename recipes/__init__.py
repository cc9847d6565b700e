"""Everything that a user launches: recipes, the command line, the quickstart, the report."""
