//! The README tells the truth about names: settings, failure reasons, metrics, commands.

use std::path::Path;

use nirn_proxy::config::table::VARIABLES;
use nirn_proxy::error::Reason;
use nirn_proxy::observe::metrics::Metrics;

const README: &str = include_str!("../README.md");

/// What stands between single backticks.
fn quoted() -> Vec<&'static str> {
    let prose = README.split("```").step_by(2);
    prose.flat_map(|part| part.split('`').skip(1).step_by(2)).collect()
}

#[test]
fn every_setting_it_names_exists() {
    let setting = |word: &&str| word.contains('_') && word.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    let words = quoted().into_iter().map(|word| word.split('=').next().unwrap()).filter(setting);
    for word in words {
        assert!(VARIABLES.iter().any(|variable| variable.name == word), "{word} is no setting");
    }
}

#[test]
fn every_failure_reason_is_in_its_table_once() {
    for reason in Reason::ALL {
        let cell = format!("| `{}` |", reason.as_str());
        assert_eq!(README.matches(&cell).count(), 1, "{cell}");
    }
}

#[test]
fn every_metric_of_the_proxy_is_in_its_table() {
    let text = String::from_utf8(Metrics::new().render().unwrap().1).unwrap();
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE nirn_proxy_"));
    for name in names.map(|line| line.split(' ').next().unwrap()) {
        assert_eq!(README.matches(&format!("| `nirn_proxy_{name}` |")).count(), 1, "nirn_proxy_{name}");
    }
}

#[test]
fn every_file_it_links_to_exists() {
    let links = README.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
    for link in links.filter(|link| !link.starts_with("http")) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(link.split('#').next().unwrap());
        assert!(file.exists(), "{link}");
    }
}
