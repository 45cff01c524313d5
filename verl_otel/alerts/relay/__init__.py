"""From Alertmanager's webhook to group robots, and to the run that an alert is about.

`server` takes notifications, `delivery` has a queue and a thread for each robot, `robots` knows what each kind wants,
`message` writes the text, `actions` asks the run to pause or stop.
"""
