//! The rules of the house that a compiler does not know: layers, lengths, words, and what is depended on.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Decisions, as files or as folders of them: time and effects come from outside.
const CORE: [&str; 25] = [
    "src/config",
    "src/error",
    "src/identity",
    "src/route",
    "src/front/framing",
    "src/front/headers",
    "src/front/unread",
    "src/scheduler/bucket",
    "src/scheduler/budget",
    "src/scheduler/client",
    "src/scheduler/coding",
    "src/scheduler/detail",
    "src/scheduler/handover",
    "src/scheduler/key",
    "src/scheduler/line",
    "src/scheduler/pacer",
    "src/scheduler/profile",
    "src/scheduler/room",
    "src/scheduler/routes",
    "src/scheduler/signal",
    "src/cluster/members",
    "src/cluster/node",
    "src/cluster/seal",
    "src/cluster/tls",
    "src/observe/flamegraph",
];

/// What a core may not reach for: sockets, tasks, clocks, logs, metrics, and this crate's own shell.
const SHELL: [&str; 18] = [
    "tokio::",
    "hyper::",
    "hyper_util::",
    "reqwest::",
    "prometheus::",
    "pprof::",
    "tracing::",
    "std::net::{",
    "std::net::Tcp",
    "std::net::Udp",
    "std::thread",
    "Instant::now",
    "SystemTime::now",
    "crate::clock",
    "crate::observe",
    "crate::upstream",
    "crate::probe",
    "crate::front::",
];

/// What is a value and not an effect, although it lives in a crate of the shell.
const VALUES: [&str; 3] = ["tracing::Level", "std::net::{IpAddr", "std::net::{Ipv"];

/// Lines of a source file, its tests included.
const MAX_LINES: usize = 450;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text files under a folder of the repository, with their paths in it.
fn files(folder: &str, accept: fn(&str) -> bool) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for path in entries.map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() && !matches!(name.as_str(), "target" | ".git" | "node_modules") {
                folders.push(path);
            } else if path.is_file() && name != ".git" && accept(&name) {
                let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
                found.push((relative(&path), text));
            }
        }
    }
    found.sort();
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned()
}

fn sources() -> Vec<(String, String)> {
    files("", |name| name.ends_with(".rs"))
}

#[test]
fn the_cores_do_not_reach_for_the_shell() {
    let mut cores = BTreeSet::new();
    let mut broken = Vec::new();
    for (path, text) in sources() {
        let stem = path.trim_end_matches(".rs");
        let Some(core) = CORE.iter().find(|core| stem == **core || path.starts_with(&format!("{core}/"))) else {
            continue;
        };
        cores.insert(*core);
        let code = text.lines().take_while(|line| !line.starts_with("#[cfg(test)]")).enumerate();
        for (number, line) in code.filter(|_| !path.ends_with("/tests.rs")) {
            let line = line.split("//").next().unwrap_or_default();
            let reaches = |word: &&&str| line.contains(**word) && !VALUES.iter().any(|value| line.contains(value));
            broken.extend(SHELL.iter().find(reaches).map(|word| format!("{path}:{}: {word}", number + 1)));
        }
    }
    assert!(broken.is_empty(), "a core reaches for the shell:\n{}", broken.join("\n"));
    assert!(cores.len() == CORE.len(), "the list of cores has lost touch: only {cores:?} exist");
}

#[test]
fn files_stay_readable_in_length() {
    let long: Vec<String> = sources()
        .iter()
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(_, lines)| *lines > MAX_LINES)
        .map(|(path, lines)| format!("{path}: {lines}"))
        .collect();
    assert!(long.is_empty(), "longer than {MAX_LINES} lines:\n{}", long.join("\n"));
}

#[test]
fn unfinished_or_private_things_are_not_written_down() {
    // In two parts, so that this file may pass its own test.
    let words: Vec<String> = [
        ("to", "do!("),
        ("TO", "DO"),
        ("FIX", "ME"),
        ("dbg", "!("),
        ("/ro", "ot/"),
        ("/work", "/"),
        ("crates", ".io"),
        ("npm", "js."),
        ("pypi", ".org"),
        ("pythonhosted", ".org"),
    ]
    .into_iter()
    .map(|(start, end)| format!("{start}{end}"))
    .collect();
    let texts = files("", |name| name != "Cargo.lock" && !name.ends_with(".pem") && !name.ends_with(".der"));
    let mut found = Vec::new();
    for (path, text) in &texts {
        for (number, line) in text.lines().enumerate() {
            found.extend(
                words.iter().find(|word| line.contains(*word)).map(|word| format!("{path}:{}: {word}", number + 1)),
            );
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(!texts.iter().any(|(path, _)| path.ends_with("utils.rs") || path.ends_with("util.rs")));
}

/// Every package that is built here, with its licence, as `name vX.Y.Z` and an SPDX expression.
fn packages() -> BTreeSet<(String, String)> {
    let arguments =
        ["--offline", "--locked", "--workspace", "-e", "normal,build,dev", "--prefix", "none", "-f", "{p}|{l}"];
    let output = Command::new(env!("CARGO"))
        .args(["--color", "never", "tree"])
        .args(arguments)
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let packages = text.lines().filter_map(|line| line.split_once('|'));
    packages.map(|(package, licence)| (package.to_owned(), licence.trim_end_matches(" (*)").to_owned())).collect()
}

/// Whether an SPDX expression leaves a choice that only needs the given licences.
fn permits(expression: &str, allowed: &[&str]) -> bool {
    let expression = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = expression.split_whitespace().collect();
    either(&mut words.iter().copied().peekable(), allowed)
}

type Words<'a> = std::iter::Peekable<std::iter::Copied<std::slice::Iter<'a, &'a str>>>;

fn either(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let mut permitted = both(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        permitted |= both(words, allowed);
    }
    permitted
}

fn both(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    let mut permitted = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        permitted &= one(words, allowed);
    }
    permitted
}

fn one(words: &mut Words<'_>, allowed: &[&str]) -> bool {
    if words.next_if_eq(&"(").is_some() {
        let permitted = either(words, allowed);
        return words.next_if_eq(&")").is_some() && permitted;
    }
    let Some(licence) = words.next() else { return false };
    // An exception only ever gives more freedom.
    if words.next_if_eq(&"WITH").is_some() {
        words.next();
    }
    allowed.contains(&licence)
}

#[test]
fn every_dependency_has_a_licence_that_fits_ours() {
    let allowed = [
        "Apache-2.0",
        "MIT",
        "MIT-0",
        "0BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "Zlib",
        "Unicode-3.0",
        "CDLA-Permissive-2.0",
        // By file: it asks nothing of what links to it unchanged.
        "MPL-2.0",
    ];
    assert!(permits("(MIT OR GPL-3.0) AND ISC", &allowed) && !permits("MIT AND GPL-3.0", &allowed));
    assert!(permits("MIT/GPL-3.0", &allowed) && !permits("GPL-3.0", &allowed) && !permits("", &allowed));
    let packages = packages();
    assert!(packages.len() > 100, "the list of packages was not read: {packages:?}");
    let unfit: Vec<_> = packages.iter().filter(|(_, licence)| !permits(licence, &allowed)).collect();
    assert!(unfit.is_empty(), "licences not on the list: {unfit:?}");
}

#[test]
fn one_provider_does_all_cryptography() {
    let packages = packages();
    let names: Vec<&str> = packages.iter().filter_map(|(package, _)| package.split(' ').next()).collect();
    for other in ["ring", "openssl", "openssl-sys", "native-tls", "boring", "graviola", "rustls-rustcrypto", "mbedtls"]
    {
        assert!(!names.contains(&other), "{other} is built beside aws-lc-rs");
    }
    for single in ["aws-lc-rs", "aws-lc-sys", "rustls", "tokio", "hyper", "http"] {
        assert_eq!(names.iter().filter(|name| **name == single).count(), 1, "versions of {single}");
    }
}

#[test]
fn every_dependency_comes_from_the_registry_and_is_locked_by_hash() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    for package in lock.split("[[package]]").skip(1) {
        let has = |key: &str| package.lines().any(|line| line.starts_with(key));
        assert!(!package.contains("\"git+"), "from a repository and not a release:{package}");
        assert_eq!(has("source = \"registry+"), has("checksum = "), "without a hash:{package}");
        let own = ["\"nirn-proxy\"", "\"fake-discord\""].iter().any(|name| package.contains(&format!("name = {name}")));
        assert!(own || has("source = "), "neither ours nor the registry's:{package}");
    }
}
