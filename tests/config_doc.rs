//! CONFIG.md says what the code does: every variable, its default and what it accepts, both ways.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use nirn_proxy::config::table::VARIABLES;

/// A row of a table: name, default, accepts.
type Row = (String, String, String);

fn documented() -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("CONFIG.md");
    let text = fs::read_to_string(path).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, default, accepts, meaning] = cells[..] else { panic!("not four cells: {row}") };
        assert!(meaning.len() > 5, "no meaning: {row}");
        let plain = |cell: &str| cell.strip_prefix('`').unwrap().strip_suffix('`').unwrap().to_owned();
        (plain(name), plain(default), plain(accepts))
    })
    .collect()
}

#[test]
fn every_variable_is_documented_with_its_default_and_range_and_no_other_is() {
    let documented = documented();
    let known: BTreeSet<Row> = VARIABLES
        .iter()
        .map(|variable| (variable.name.to_owned(), variable.default.to_owned(), variable.accepts.to_string()))
        .collect();
    let written: BTreeSet<Row> = documented.iter().cloned().collect();
    let missing: Vec<_> = known.difference(&written).collect();
    let invented: Vec<_> = written.difference(&known).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "not in CONFIG.md: {missing:#?}\nnot in the code: {invented:#?}"
    );
    assert_eq!(documented.len(), VARIABLES.len(), "a variable is documented twice");
}

#[test]
fn names_in_the_text_are_names_of_variables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("CONFIG.md");
    let text = fs::read_to_string(path).unwrap();
    for word in text.split('`').skip(1).step_by(2) {
        let shouted = word.starts_with(|first: char| first.is_ascii_uppercase())
            && word.contains('_')
            && word.bytes().all(|byte| byte.is_ascii_uppercase() || b"_2401".contains(&byte));
        let known = VARIABLES.iter().any(|variable| variable.name == word);
        assert!(!shouted || known, "{word} is no variable");
    }
}
