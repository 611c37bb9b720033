//! The dashboard asks for nothing that `/metrics` does not export.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::collections::{BTreeMap, BTreeSet};

use http::{Method, StatusCode};
use nirn_proxy::identity::Kind;
use nirn_proxy::observe::metrics::Metrics;
use nirn_proxy::route::Route;
use serde_json::Value;

/// What the queries call and combine with.
const WORDS: [&str; 19] = [
    "sum",
    "max",
    "count",
    "rate",
    "increase",
    "topk",
    "histogram_quantile",
    "clamp_min",
    "label_values",
    "vector",
    "time",
    "by",
    "on",
    "group_left",
    "or",
    "and",
    "unless",
    "avg",
    "min",
];
/// Labels that Prometheus adds when it scrapes.
const SCRAPED: [&str; 2] = ["instance", "job"];

fn dashboard() -> Value {
    serde_json::from_str(include_str!("../grafana/nirn-proxy-dashboard.json")).unwrap()
}

/// Every exported series' name with its labels.
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let metrics = Metrics::new();
    let series = metrics.route(&Method::GET, &Route::classify(&Method::GET, "/api/v10/users/@me", 0));
    series.observe(StatusCode::OK, false, Kind::Bot, 0.1);
    drop(series.open());
    let text = String::from_utf8(metrics.render().unwrap().1).unwrap();
    let mut exported = BTreeMap::<String, BTreeSet<String>>::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, labels) = line.split_once(['{', ' ']).unwrap();
        let labels = if line.contains('{') { matchers(labels) } else { BTreeSet::new() };
        exported.entry(name.to_owned()).or_default().extend(labels);
    }
    exported
}

/// The label names before each `=`, `!=`, `=~` or `!~` up to the closing brace.
fn matchers(text: &str) -> BTreeSet<String> {
    let (mut names, mut name, mut quoted) = (BTreeSet::new(), String::new(), false);
    for character in text.chars() {
        match character {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '}' => break,
            '=' | '!' => drop(names.insert(std::mem::take(&mut name))),
            ',' | '~' | ' ' => name.clear(),
            _ => name.push(character),
        }
    }
    names.remove("");
    names
}

/// Every query of the dashboard, those of its variables included, with where it is from.
fn queries(dashboard: &Value) -> Vec<(String, String)> {
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries.push((panel["title"].as_str().unwrap().to_owned(), target["expr"].as_str().unwrap().to_owned()));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if let Some(query) = variable["query"]["query"].as_str() {
            queries.push((variable["name"].as_str().unwrap().to_owned(), query.to_owned()));
        }
    }
    queries
}

/// Splits a query into words, each with what follows it; matchers, texts, ranges and numbers are left out.
fn words(query: &str) -> Vec<(&str, &str)> {
    let word = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let (mut found, mut rest) = (Vec::new(), query);
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|character| !word(character)).unwrap_or(rest.len());
        match first {
            '"' => rest = &rest[rest[1..].find('"').unwrap() + 2..],
            '[' => rest = &rest[rest.find(']').unwrap()..],
            '{' => rest = &rest[rest.find('}').unwrap()..],
            _ if length == 0 => rest = &rest[first.len_utf8()..],
            _ => {
                if first.is_ascii_alphabetic() {
                    found.push((&rest[..length], rest[length..].trim_start()));
                }
                rest = &rest[length..];
            }
        }
    }
    found
}

/// What is wrong with a query.
fn objections(query: &str, exported: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut objections = Vec::new();
    let mut known: BTreeSet<String> = SCRAPED.iter().map(ToString::to_string).collect();
    for (name, rest) in words(query) {
        if let Some(labels) = exported.get(name) {
            let wanted = rest.strip_prefix('{').map(matchers).unwrap_or_default();
            let missing = wanted.iter().filter(|label| !labels.contains(*label) && !SCRAPED.contains(&label.as_str()));
            objections.extend(missing.map(|label| format!("{name} has no label {label}")));
            known.extend(labels.iter().cloned());
        }
    }
    for (name, _) in words(query) {
        if !exported.contains_key(name) && !known.contains(name) && !WORDS.contains(&name) {
            objections.push(format!("{name} is not exported"));
        }
    }
    objections
}

#[test]
fn every_query_uses_metrics_and_labels_that_exist() {
    let exported = exported();
    assert_eq!(objections("sum by (route) (rate(nirn_proxy_requests_count{status=~\"2.*\"}[5m]))", &exported), [""; 0]);
    assert_eq!(objections("nirn_proxy_error{route=\"x\"}", &exported), ["nirn_proxy_error has no label route"]);
    assert_eq!(objections("sum by (bucket) (nirn_proxy_error)", &exported), ["bucket is not exported"]);
    assert_eq!(objections("rate(nirn_proxy_errors[5m])", &exported), ["nirn_proxy_errors is not exported"]);
    let dashboard = dashboard();
    let queries = queries(&dashboard);
    assert!(queries.len() > 20);
    for (place, query) in queries {
        assert_eq!(objections(&query, &exported), [""; 0], "{place}: {query}");
    }
}

#[test]
fn every_metric_of_the_proxy_is_on_the_dashboard() {
    let dashboard = dashboard();
    let queries = queries(&dashboard);
    for name in exported().keys().filter(|name| name.starts_with("nirn_proxy_")) {
        assert!(
            queries.iter().any(|(_, query)| words(query).iter().any(|(word, _)| word == name)),
            "{name} is not shown"
        );
    }
}

#[test]
fn the_dashboard_is_importable() {
    let dashboard = dashboard();
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 36);
    assert!(dashboard["id"].is_null() && dashboard["title"].is_string() && dashboard["uid"].is_string());
    assert_eq!(dashboard["templating"]["list"][0]["type"], "datasource");
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "two panels share an id");
        let side = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        for (x, y) in
            (side("x")..side("x") + side("w")).flat_map(|x| (side("y")..side("y") + side("h")).map(move |y| (x, y)))
        {
            assert!(x < 24 && cells.insert((x, y)), "{} overlaps", panel["title"]);
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], "${datasource}");
        }
    }
}
