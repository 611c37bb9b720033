//! What the limiter costs and saves, against a fake Discord that enforces its limits: the same requests straight at it
//! with a well-behaved library's own limiter in each process, and through the proxy.
//!
//! `cargo bench --bench limits` runs everything on loopback, in under five minutes, and prints one table.
//! `cargo bench --bench limits -- NAME` runs the scenarios whose name contains NAME.

mod library;
mod load;
mod scenarios;

use std::time::Duration;

use load::Report;
use scenarios::Scenario;

#[tokio::main]
async fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let chosen = |scenario: &Scenario| wanted.is_empty() || wanted.iter().any(|name| scenario.name.contains(name));
    println!("| scenario | by | requests | finished | of ideal | 429s | failed | median | p90 | p99 |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    // Those that measure latency have the machine for themselves; the others mostly sleep.
    let (alone, together): (Vec<_>, Vec<_>) = scenarios::all().into_iter().filter(chosen).partition(|it| it.alone);
    for scenario in alone {
        for proxied in [false, true] {
            let report = load::run((scenario.script)(), (scenario.jobs)(), proxied, scenario.queue).await;
            print(&scenario, proxied, &report);
        }
    }
    let mut running = tokio::task::JoinSet::new();
    for scenario in together {
        for proxied in [false, true] {
            let scenario = scenario.clone();
            running.spawn(async move {
                let report = load::run((scenario.script)(), (scenario.jobs)(), proxied, scenario.queue).await;
                (proxied, scenario, report)
            });
        }
    }
    while let Some(Ok((proxied, scenario, report))) = running.join_next().await {
        print(&scenario, proxied, &report);
    }
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
