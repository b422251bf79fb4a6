"""From what the user names to checked image splits: sources, folders, lists, held-out parts."""
