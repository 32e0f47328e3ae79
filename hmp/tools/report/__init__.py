"""What ran in which precision: recorded, shown as tables and pages, compared between runs."""
