//! Samples in, Prometheus text out.

use prometheus::TextEncoder;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric};
use prometheus::proto::{MetricFamily, MetricType};

use crate::Buckets;

/// What an HTTP answer says of a [`Page`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics with their samples, in the order in which they were added.
#[derive(Debug, Default)]
pub struct Page {
    families: Vec<MetricFamily>,
}

impl Page {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A number that only grows; `name` ends with `_total`.
    pub fn counter(&mut self, name: &str, help: &str) -> Samples<'_> {
        self.family(name, help, MetricType::COUNTER)
    }

    /// A number that comes and goes.
    pub fn gauge(&mut self, name: &str, help: &str) -> Samples<'_> {
        self.family(name, help, MetricType::GAUGE)
    }

    /// Durations; `name` ends with `_seconds`.
    pub fn histogram(&mut self, name: &str, help: &str) -> Samples<'_> {
        self.family(name, help, MetricType::HISTOGRAM)
    }

    fn family(&mut self, name: &str, help: &str, kind: MetricType) -> Samples<'_> {
        let mut family = MetricFamily::default();
        family.set_name(name.into());
        family.set_help(help.into());
        family.set_field_type(kind);
        self.families.push(family);
        let at = self.families.len() - 1;
        Samples {
            family: &mut self.families[at],
            kind,
        }
    }

    /// The text; metrics without a sample are left out, as the format has nothing to say of them.
    pub fn render(&self) -> String {
        let mut text = String::new();
        for family in &self.families {
            if !family.get_metric().is_empty() {
                let family = std::slice::from_ref(family);
                if let Err(e) = TextEncoder::new().encode_utf8(family, &mut text) {
                    tracing::warn!("a metric was left out: {e}");
                }
            }
        }
        text
    }
}

/// The samples of one metric.
#[derive(Debug)]
pub struct Samples<'a> {
    family: &'a mut MetricFamily,
    kind: MetricType,
}

impl Samples<'_> {
    /// Adds a number, with labels; for counters and gauges.
    pub fn add(&mut self, labels: &[(&str, &str)], value: f64) -> &mut Self {
        let mut metric = labelled(labels);
        if self.kind == MetricType::COUNTER {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        self.family.mut_metric().push(metric);
        self
    }

    /// Adds a whole number, with labels. Beyond 2^53 its last digits are rounded, as Prometheus
    /// keeps nothing else.
    pub fn count(&mut self, labels: &[(&str, &str)], value: u64) -> &mut Self {
        self.add(labels, value as f64)
    }

    /// Adds a histogram, with labels.
    pub fn buckets(&mut self, labels: &[(&str, &str)], buckets: &Buckets) -> &mut Self {
        let mut histogram = Histogram::default();
        let ends = buckets.cumulative().map(|(end, below)| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(end);
            bucket.set_cumulative_count(below);
            bucket
        });
        histogram.set_bucket(ends.collect());
        histogram.set_sample_count(buckets.count());
        histogram.set_sample_sum(buckets.sum().as_secs_f64());
        let mut metric = labelled(labels);
        metric.set_histogram(histogram);
        self.family.mut_metric().push(metric);
        self
    }
}

fn labelled(labels: &[(&str, &str)]) -> Metric {
    let pair = |(name, value): &(&str, &str)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).into());
        pair.set_value((*value).into());
        pair
    };
    Metric::from_label(labels.iter().map(pair).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Durations;

    #[test]
    fn page_is_the_text_that_prometheus_reads() {
        let mut page = Page::new();
        page.counter("a_total", "What a\nis.")
            .count(&[("rail", "the \"first\"\n")], 7)
            .count(&[], 1 << 53);
        page.gauge("b", "What b is.").add(&[], 0.5);
        page.gauge("without_a_sample", "Nothing.");
        let durations = Durations::default();
        durations.record(Duration::from_micros(20));
        page.histogram("c_seconds", "What c is.")
            .buckets(&[("rail", "x")], &durations.snapshot());
        let text = page.render();
        let expected = "# HELP a_total What a\\nis.\n# TYPE a_total counter\n\
            a_total{rail=\"the \\\"first\\\"\\n\"} 7\na_total 9007199254740992\n\
            # HELP b What b is.\n# TYPE b gauge\nb 0.5\n\
            # HELP c_seconds What c is.\n# TYPE c_seconds histogram\n\
            c_seconds_bucket{rail=\"x\",le=\"0.000016\"} 0\n\
            c_seconds_bucket{rail=\"x\",le=\"0.000032\"} 1\n";
        assert!(text.starts_with(expected), "{text}");
        let end = "c_seconds_bucket{rail=\"x\",le=\"+Inf\"} 1\n\
            c_seconds_sum{rail=\"x\"} 0.00002\nc_seconds_count{rail=\"x\"} 1\n";
        assert!(text.ends_with(end), "{text}");
        assert!(!text.contains("without_a_sample"), "{text}");
    }
}
