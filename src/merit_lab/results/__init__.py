"""What runs came to: which are alike, one statistic, charts, and the page of a report or a study."""
