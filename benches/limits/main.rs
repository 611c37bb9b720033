//! What the limiter costs and saves, against a fake Discord that enforces its limits: the same requests straight at it
//! with a well-behaved library's own limiter in each process, and through the proxy.
//!
//! `cargo bench --bench limits` runs everything on loopback, in under five minutes, and prints one table.
//! `cargo bench --bench limits -- NAME` runs the scenarios whose name contains NAME.

mod library;
mod load;
mod scenarios;

use std::time::Duration;

use load::{Machines, Report};
use scenarios::{Scenario, When};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// A crowd's requests are all in line by then.
const CROWDED: Duration = Duration::from_secs(4);

#[tokio::main]
async fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let chosen = |scenario: &Scenario| wanted.is_empty() || wanted.iter().any(|name| scenario.name.contains(name));
    println!("| scenario | by | requests | finished | of ideal | 429s | failed | median | p90 | p99 |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    // Never dropped: a runtime must not be within another.
    let machines: &'static Machines = Box::leak(Box::new(Machines::new()));
    let all = scenarios::all().into_iter().filter(chosen);
    let (alone, others): (Vec<_>, Vec<_>) = all.partition(|it| it.when == When::Alone);
    let (crowds, beside): (Vec<_>, Vec<_>) = others.into_iter().partition(|it| it.when == When::Crowd);
    for scenario in alone {
        for proxied in [false, true] {
            one(machines, &scenario, proxied).await;
        }
    }
    let mut running = JoinSet::new();
    let busy = !crowds.is_empty();
    running.spawn(async move {
        for scenario in &crowds {
            one(machines, scenario, true).await;
        }
        let libraries = crowds.into_iter().map(|scenario| async move { one(machines, &scenario, false).await });
        libraries.collect::<JoinSet<_>>().join_all().await;
    });
    if busy {
        sleep(CROWDED).await;
    }
    for scenario in beside {
        for proxied in [false, true] {
            let scenario = scenario.clone();
            running.spawn(async move { one(machines, &scenario, proxied).await });
        }
    }
    running.join_all().await;
}

async fn one(machines: &Machines, scenario: &Scenario, proxied: bool) {
    let report = load::run(machines, scenario, proxied).await;
    print(scenario, proxied, &report);
}

fn print(scenario: &Scenario, proxied: bool, report: &Report) {
    let by = if proxied { "proxy" } else { "libraries" };
    let ideal = scenario.ideal.map_or_else(
        || "-".into(),
        |ideal: Duration| format!("{:.3}", report.took.as_secs_f64() / ideal.as_secs_f64()),
    );
    println!(
        "| {} | {by} | {} | {:.2} s | {ideal} | {} | {} | {:.1} ms | {:.1} ms | {:.1} ms |",
        scenario.name,
        report.requests,
        report.took.as_secs_f64(),
        report.refused,
        report.failed,
        report.quantile(0.5),
        report.quantile(0.9),
        report.quantile(0.99),
    );
    for line in (scenario.notes)(report) {
        println!("|   | {by} | {line} |||||||| ");
    }
}
