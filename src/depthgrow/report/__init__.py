"""The report: reads a study's files, computes statistics, writes tables and figures. Never imports torch."""
