"""The lab: data, models, training, comparison and reports, from text to a page of results."""
