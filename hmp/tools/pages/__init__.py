"""HTML pages and charts that several tools make."""
