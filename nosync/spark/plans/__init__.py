"""Views: queries of Spark, as stages that are kept up to date.

    text or DataFrames -> query: Spark's analyzed plan, rewritten by some of its rules
                       -> translator: each node of it to stages, by relation (names), expressions (texts), aggregates,
                          joins and over (window functions)

What a plan has that cannot be kept up to date is refused by its clause and line, where the view is declared. Nothing here
runs anything: it ends with stages of a dataflow. The design, and which rules are applied, is in docs/sql.md.
"""
