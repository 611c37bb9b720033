//! Paths: patterns, major parameters, and who authenticates by the path.

/// What a path says about limits, without looking at any table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The path without query, `/api` and version; empty segments dropped.
    pub segments: Vec<String>,
    /// The major parameter as text, `""` when there is none.
    pub major: String,
    /// Exempt from the global limit.
    pub interaction: bool,
    /// Authenticated by a token in the path.
    pub path_token: bool,
}

/// The beginning of every interaction token: base64 of `interaction:`.
const INTERACTION: &str = "aW50ZXJhY3Rpb246";

impl Place {
    /// Reads a request target.
    pub fn of(target: &[u8]) -> Self {
        let path = target.split(|&byte| byte == b'?').next().unwrap_or_default();
        let path = String::from_utf8_lossy(path);
        let mut segments: Vec<String> = path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect();
        if segments.first().is_some_and(|first| first == "api") {
            segments.remove(0);
            let version = |text: &str| text.strip_prefix('v').is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
            if segments.first().is_some_and(|first| version(first)) {
                segments.remove(0);
            }
        }
        let part = |index: usize| segments.get(index).map_or("", String::as_str);
        let (mut interaction, mut path_token) = (false, false);
        let major = match (part(0), part(1), part(2)) {
            ("channels" | "guilds", id, _) => format!("{}/{id}", part(0)),
            ("webhooks", _, token) if token.starts_with(INTERACTION) => {
                (interaction, path_token) = (true, true);
                format!("interaction/{token}")
            }
            ("webhooks", id, token) => {
                path_token = !token.is_empty();
                format!("webhooks/{id}/{token}")
            }
            ("interactions", _, token) => {
                (interaction, path_token) = (true, true);
                format!("interaction/{token}")
            }
            _ => String::new(),
        };
        Self { segments, major, interaction, path_token }
    }
}

/// `METHOD /path` with `{}` for any one segment and a last `**` for any rest.
#[derive(Clone, Debug)]
pub struct Pattern {
    method: String,
    segments: Vec<String>,
}

impl Pattern {
    /// Reads a pattern; `/api` and the version are dropped from it as from a path.
    pub fn new(text: &str) -> Self {
        let (method, path) = text.trim().split_once(' ').unwrap_or(("*", text));
        Self::of(method, path.trim())
    }

    /// A pattern from its two parts.
    pub fn of(method: &str, path: &str) -> Self {
        Self { method: method.into(), segments: Place::of(path.as_bytes()).segments }
    }

    /// Whether a request is meant.
    pub fn matches(&self, method: &str, place: &Place) -> bool {
        if self.method != "*" && self.method != method {
            return false;
        }
        let mut parts = place.segments.iter();
        for wanted in &self.segments {
            if wanted == "**" {
                return true;
            }
            match parts.next() {
                Some(part) if wanted == "{}" || wanted == part => {}
                _ => return false,
            }
        }
        parts.next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_a_method_and_whole_paths() {
        let place = Place::of(b"/api/v10/channels/1/messages/2/reactions/%23/@me?x=1");
        assert!(Pattern::new("PUT /channels/{}/messages/{}/reactions/**").matches("PUT", &place));
        assert!(Pattern::new("* /api/v9/channels/1/messages/{}/reactions/{}/@me").matches("PUT", &place));
        assert!(!Pattern::new("DELETE /channels/{}/messages/{}/reactions/**").matches("PUT", &place));
        assert!(!Pattern::new("PUT /channels/{}/messages").matches("PUT", &place));
    }

    #[test]
    fn one_interaction_is_one_major_parameter_and_webhooks_part_by_token() {
        let follow_up = Place::of(b"/api/webhooks/7/aW50ZXJhY3Rpb246abc/messages/@original");
        let callback = Place::of(b"/api/v10/interactions/9/aW50ZXJhY3Rpb246abc/callback");
        assert_eq!(follow_up.major, callback.major);
        assert!(follow_up.interaction && callback.interaction);
        assert_ne!(Place::of(b"/webhooks/1/a").major, Place::of(b"/webhooks/1/b").major);
        assert!(!Place::of(b"/webhooks/1").path_token && !Place::of(b"/webhooks/1/a").interaction);
        assert_eq!(Place::of(b"/users/@me").major, "");
    }
}
