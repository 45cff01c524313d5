"""Metrics as OTLP has them: by the SDK's encoder, and points without a value, which it does not know."""

import math
from typing import Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags
from opentelemetry.sdk.metrics.export import MetricsData

_NO_RECORDED_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK


def encode(data: MetricsData) -> Any:
    """A request. Gauges of `verl_otel.metrics.withdrawn.NO_VALUE`, which are metrics of their own, have no value."""
    request = encode_metrics(data)
    for group in request.resource_metrics:
        for scope in group.scope_metrics:
            for metric in scope.metrics:
                points = metric.gauge.data_points if metric.HasField("gauge") else []
                if points and math.isnan(points[0].as_double):
                    for point in points:
                        point.ClearField("as_double")
                        point.flags = _NO_RECORDED_VALUE
    return request
