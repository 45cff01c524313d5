_instruments = ("verl >= 0.6.1",)
_supports_metrics = True
