//! What settings make of variables.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::time::Duration;

use proptest::prelude::*;
use tracing::Level;

use super::table::{Accepts, VARIABLES};
use super::{Config, Seed, Seeds};

fn read(vars: &[(&str, &str)]) -> Result<Config, Vec<String>> {
    Config::from_vars(vars.iter().map(|(name, value)| (name.into(), value.into())))
        .map_err(|problems| problems.iter().map(ToString::to_string).collect())
}

const CLUSTER: [(&str, &str); 6] = [
    ("CLUSTER_MEMBERS", "10.0.0.1, node-2:7000 ,[2001:db8::1]:7001,2001:db8::2"),
    ("CLUSTER_SECRET", "0123456789abcdef0123456789abcdef"),
    ("CLUSTER_CA_FILE", "/ca.pem"),
    ("CLUSTER_CERT_FILE", "/cert.pem"),
    ("CLUSTER_KEY_FILE", "/key.pem"),
    ("CLUSTER_MAX_NODES", "3"),
];

#[test]
fn without_any_variable_the_defaults_hold() {
    let config = read(&[]).unwrap();
    assert_eq!((config.log.level, config.log.json), (Level::INFO, false));
    assert_eq!((config.bind_ip, config.port), (Ipv4Addr::UNSPECIFIED.into(), 8080));
    assert!(config.upstream.https && !config.upstream.http2);
    assert_eq!(config.upstream.authority, "discord.com");
    assert_eq!(config.upstream.request_timeout, Duration::from_secs(5));
    assert_eq!(config.scheduling.request_timeout, Duration::from_secs(5));
    assert_eq!(config.scheduling.queue_timeout, Duration::from_secs(60));
    assert_eq!(config.scheduling.invalid_request_limit, 9500);
    assert_eq!(config.max_in_flight_requests, 4096);
    assert_eq!((config.metrics_port, config.pprof_port), (Some(9000), None));
    assert!(config.cluster.is_none() && config.warnings.is_empty() && config.scheduling.overrides.is_empty());
}

#[test]
fn every_bad_value_is_told_at_once_in_a_line_that_names_its_variable() {
    let vars: Vec<(&str, &str)> = VARIABLES
        .iter()
        .filter(|variable| !matches!(variable.accepts, Accepts::Text("anything" | "path of a PEM file")))
        .filter(|variable| variable.name != "NO_PROXY")
        .map(|variable| (variable.name, "bad one\n\t"))
        .collect();
    let mut named: Vec<String> = Vec::new();
    for problem in read(&vars).unwrap_err() {
        assert_eq!(problem.lines().count(), 1, "{problem}");
        let (name, rest) = problem.split_once(' ').unwrap();
        assert!(rest.starts_with("accepts ") || rest.starts_with("is required in a cluster"), "{problem}");
        let secret = VARIABLES.iter().any(|variable| variable.name == name && variable.secret);
        assert!(!secret || !rest.contains("bad one"), "{problem}");
        named.push(name.to_owned());
    }
    let mut expected: Vec<&str> = vars.iter().map(|(name, _)| *name).collect();
    expected.extend(["CLUSTER_CA_FILE", "CLUSTER_CERT_FILE", "CLUSTER_KEY_FILE"]);
    expected.sort_unstable();
    named.sort_unstable();
    assert_eq!(named, expected);
}

#[test]
fn numbers_are_taken_to_the_ends_of_their_range_and_no_further() {
    for variable in VARIABLES {
        let (Accepts::Number { min, max } | Accepts::Milliseconds { min, max }) = variable.accepts else {
            continue;
        };
        assert!(read(&[(variable.name, &min.to_string())]).is_ok(), "{}", variable.name);
        assert!(read(&[(variable.name, &format!(" {max} "))]).is_ok(), "{}", variable.name);
        let outside = [min.checked_sub(1).map_or("-1".to_owned(), |low| low.to_string()), (max + 1).to_string()];
        let odd = ["99999999999999999999999", "+5", "5.0", "5s", "0x10", "1 0", "five", "1_000"].map(str::to_owned);
        for bad in outside.iter().chain(&odd) {
            let problems = read(&[(variable.name, bad)]).unwrap_err();
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].starts_with(&format!("{} accepts ", variable.name)), "{problems:?}");
            assert!(problems[0].ends_with(&format!(", got {bad:?}")), "{problems:?}");
        }
    }
}

#[test]
fn an_empty_value_means_unset_and_the_last_one_counts() {
    let empty: Vec<(&str, &str)> = VARIABLES.iter().map(|variable| (variable.name, " ")).collect();
    assert!(read(&empty).is_ok());
    assert_eq!(read(&[("PORT", "1"), ("PORT", "2")]).unwrap().port, 2);
    assert_eq!(read(&[("PORT", "1"), ("PORT", "")]).unwrap().port, 8080);
    assert_eq!(read(&[("port", "x"), ("SOMETHING", "x")]).unwrap().port, 8080);
}

#[test]
fn switches_and_words_come_in_any_case() {
    for (text, expected) in [("TRUE", true), ("1", true), ("False", false), ("0", false)] {
        assert_eq!(read(&[("DISABLE_401_LOCK", text)]).unwrap().scheduling.disable_401_lock, expected);
    }
    for (text, level) in [("PANIC", Level::ERROR), ("fatal", Level::ERROR), ("Warning", Level::WARN)] {
        assert_eq!(read(&[("LOG_LEVEL", text)]).unwrap().log.level, level);
    }
    assert!(read(&[("LOG_FORMAT", "JSON")]).unwrap().log.json);
    assert!(read(&[("DISABLE_HTTP_2", "yes")]).is_err());
}

#[test]
fn text_that_is_not_utf_8_is_refused_where_it_matters_only() {
    use std::os::unix::ffi::OsStringExt;
    let broken = || OsString::from_vec(vec![0xff]);
    assert!(Config::from_vars([("OTHER".into(), broken()), (broken(), "x".into())]).is_ok());
    let problems = Config::from_vars([("PORT".into(), broken())]).unwrap_err();
    assert_eq!(problems[0].to_string(), "PORT accepts a whole number from 1 to 65535, got text that is not UTF-8");
}

#[test]
fn a_host_name_binds_the_address_it_has_and_never_in_a_cluster() {
    let read = |vars: &[(&str, &str)]| {
        let vars: Vec<_> = vars.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let known = |host: &str| (host == "node.internal").then_some(Ipv4Addr::new(10, 0, 0, 7).into());
        Config::from_vars_on(vars, "node".into(), known)
    };
    assert_eq!(read(&[("BIND_IP", "node.internal")]).unwrap().bind_ip, Ipv4Addr::new(10, 0, 0, 7));
    assert_eq!(read(&[("BIND_IP", "::")]).unwrap().bind_ip, std::net::Ipv6Addr::UNSPECIFIED);
    assert!(read(&[("BIND_IP", "other.internal")]).is_err());
    assert!(read(&[("BIND_IP", "10.0.0.256")]).is_err());
    assert!(read(&[&CLUSTER[..], &[("BIND_IP", "node.internal")]].concat()).is_err());
}

#[test]
fn a_cluster_needs_its_settings_and_shares_the_invalid_request_budget() {
    let config = read(&CLUSTER).unwrap();
    let cluster = config.cluster.unwrap();
    let seed = |host: &str, port| Seed { host: host.into(), port };
    let members =
        vec![seed("10.0.0.1", 7946), seed("node-2", 7000), seed("2001:db8::1", 7001), seed("2001:db8::2", 7946)];
    assert_eq!(cluster.seeds, Seeds::Members(members));
    assert_eq!(config.scheduling.invalid_request_limit, 3166);
    assert!(!format!("{cluster:?}").contains("0123456789abcdef"));

    let dns = [&CLUSTER[1..], &[("CLUSTER_DNS", "nodes.internal"), ("CLUSTER_PORT", "17946")]].concat();
    let cluster = read(&dns).unwrap().cluster.unwrap();
    assert_eq!(cluster.seeds, Seeds::Dns(vec![seed("nodes.internal", 17946)]));

    assert_eq!(read(&CLUSTER[1..]).unwrap().scheduling.invalid_request_limit, 9500);
    assert_eq!(read(&CLUSTER[..1]).unwrap_err().len(), 4);
    let short = [&CLUSTER[..], &[("CLUSTER_SECRET", "0123456789abcdef0123456789abcde")]].concat();
    assert_eq!(read(&short).unwrap_err(), ["CLUSTER_SECRET accepts at least 32 characters"]);
    for bad in ["a,,b", "a:0", "a:65536", "a b", "[10.0.0.1]:1", "a:b:1", "http://a", ","] {
        assert!(read(&[&CLUSTER[..], &[("CLUSTER_MEMBERS", bad)]].concat()).is_err(), "{bad}");
    }
}

#[test]
fn settings_of_1_x_and_plain_http_are_warned_about() {
    let warnings = |vars: &[(&str, &str)]| read(vars).unwrap().warnings.len();
    assert_eq!(warnings(&[("BUFFER_SIZE", "50"), ("DISABLE_GLOBAL_RATELIMIT_DETECTION", "x")]), 2);
    assert_eq!(warnings(&[("DISCORD_API_URL", "http://fake:8000")]), 1);
    for loopback in ["http://127.0.0.2:1", "http://[::1]:1", "http://localhost", "https://fake"] {
        assert_eq!(warnings(&[("DISCORD_API_URL", loopback)]), 0, "{loopback}");
    }
}

#[test]
fn proxies_are_known_in_both_cases_and_never_shown() {
    let config = read(&[("https_proxy", "http://me:hunter2@a:3128"), ("HTTP_PROXY", "b:1"), ("http_proxy", "c:1")]);
    let proxy = config.unwrap().upstream.proxy;
    assert_eq!(proxy.https.as_deref(), Some("http://me:hunter2@a:3128"));
    assert_eq!(proxy.http.as_deref(), Some("b:1"));
    assert!(!format!("{proxy:?}").contains("hunter2"));
    for bad in ["ftp://hunter2@a", "http://me:hunter2@", "hunter2 hunter2", "http://a:99999", "http://a/hunter2"] {
        let problems = read(&[("HTTPS_PROXY", bad)]).unwrap_err();
        assert!(problems.len() == 1 && !problems[0].contains("hunter2"), "{problems:?}");
    }
}

proptest! {
    #[test]
    fn no_value_panics_and_every_problem_is_one_line(
        values in prop::collection::vec((0..VARIABLES.len(), "(.{0,12}|[0-9a-z:,@/\\[\\]. ]{0,40})"), 0..8)
    ) {
        let vars = values.iter().map(|(variable, value)| (VARIABLES[*variable].name.into(), value.into()));
        if let Err(problems) = Config::from_vars(vars) {
            for problem in problems {
                let line = problem.to_string();
                prop_assert!(!line.contains(char::is_control), "{line:?}");
                let name = line.split(' ').next();
                prop_assert!(VARIABLES.iter().any(|variable| Some(variable.name) == name));
            }
        }
    }
}
