//! Decides which requests are answered, and parses the requested content.
//!
//! Every request must name this machine in `Host`, so that a page on another site cannot reach the server
//! under a foreign name (DNS rebinding), and the random token in the path, so that other users on this
//! machine cannot read the dataset. Paths are compared with the known ones and never decoded or turned into a
//! file system path; samples and fields are named by numbers.

use super::super::query::Query;

/// Requested content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Route {
    Page,
    Style,
    Script,
    Icon,
    Summary,
    Samples(Query),
    Histogram(Query),
    /// A page of skipped samples; only the query's offset and limit apply.
    Skipped(Query),
    /// Sample row and content, by place.
    Sample(u32),
    /// Field bytes, by place and position.
    Field(u32, usize),
    /// An image in table row size.
    Thumbnail(u32, usize),
    /// An image as a JPEG, for formats that browsers do not show.
    Rendered(u32, usize),
}

/// Request that is not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Refusal {
    /// `Host` is not this machine.
    Host,
    /// The method is neither `GET` nor `HEAD`.
    Method,
    /// The token is missing or wrong, or there is no such content.
    NotFound,
    /// The query is invalid.
    Query(String),
}

/// Server token and port.
#[derive(Debug, Clone)]
pub(super) struct Gate {
    pub(super) token: String,
    pub(super) port: u16,
}

impl Gate {
    /// Returns the request route.
    ///
    /// - `host`: the header `Host`, if there is exactly one; `authority`: from the request line, if any
    pub(super) fn route(
        &self,
        method: &str,
        path: &str,
        query: &str,
        host: Option<&str>,
        authority: Option<&str>,
    ) -> Result<Route, Refusal> {
        let is_own = |host: &str| {
            ["127.0.0.1", "localhost"]
                .iter()
                .any(|name| host.eq_ignore_ascii_case(&format!("{name}:{}", self.port)))
        };
        if !(host.is_some_and(is_own) && authority.is_none_or(is_own)) {
            return Err(Refusal::Host);
        }
        if !["GET", "HEAD"].contains(&method) {
            return Err(Refusal::Method);
        }
        let mut parts = path.strip_prefix('/').ok_or(Refusal::NotFound)?.split('/');
        if !is_equal(parts.next().unwrap_or_default(), &self.token) {
            return Err(Refusal::NotFound);
        }
        let parts: Vec<&str> = parts.collect();
        let query = || Query::parse(query).map_err(Refusal::Query);
        match *parts {
            [""] => Ok(Route::Page),
            ["view.css"] => Ok(Route::Style),
            ["view.js"] => Ok(Route::Script),
            ["icon.svg"] => Ok(Route::Icon),
            ["summary"] => Ok(Route::Summary),
            ["samples"] => query().map(Route::Samples),
            ["histogram"] => query().map(Route::Histogram),
            ["skipped"] => query().map(Route::Skipped),
            ["sample", place] => Ok(Route::Sample(number(place)?)),
            ["sample", place, kind, field] => {
                let (place, field) = (number(place)?, number(field)? as usize);
                match kind {
                    "field" => Ok(Route::Field(place, field)),
                    "thumbnail" => Ok(Route::Thumbnail(place, field)),
                    "rendered" => Ok(Route::Rendered(place, field)),
                    _ => Err(Refusal::NotFound),
                }
            }
            _ => Err(Refusal::NotFound),
        }
    }
}

/// Compares in a time that does not depend on where the texts differ.
fn is_equal(given: &str, token: &str) -> bool {
    let differing = given.bytes().zip(token.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    given.len() == token.len() && differing == 0
}

fn number(text: &str) -> Result<u32, Refusal> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_plain).ok_or(Refusal::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Option<&str> = Some("127.0.0.1:7000");

    fn gate() -> Gate {
        Gate { token: "secret".into(), port: 7000 }
    }

    fn get(path: &str) -> Result<Route, Refusal> {
        gate().route("GET", path, "", HOST, None)
    }

    #[test]
    fn known_paths_have_routes() {
        assert_eq!(get("/secret/"), Ok(Route::Page));
        assert_eq!(get("/secret/view.js"), Ok(Route::Script));
        assert_eq!(get("/secret/sample/12"), Ok(Route::Sample(12)));
        assert_eq!(get("/secret/sample/12/field/3"), Ok(Route::Field(12, 3)));
        let local = gate().route("HEAD", "/secret/summary", "", Some("LOCALHOST:7000"), None);
        assert_eq!(local, Ok(Route::Summary));
        assert!(matches!(
            gate().route("GET", "/secret/samples", "limit=3", HOST, HOST),
            Ok(Route::Samples(_))
        ));
    }

    #[test]
    fn a_wrong_token_finds_nothing() {
        for path in
            ["/", "", "//", "/secre/", "/secrets/", "/Secret/", "/summary", "/wrong/summary", "secret/"]
        {
            assert_eq!(get(path), Err(Refusal::NotFound), "{path}");
        }
    }

    #[test]
    fn another_host_is_refused_before_anything_else() {
        let none = [
            None,
            Some(""),
            Some("127.0.0.1"),
            Some("127.0.0.1:7001"),
            Some("attacker.example:7000"),
            Some("127.0.0.1:7000.attacker.example"),
            Some("localhost"),
        ];
        for host in none {
            assert_eq!(gate().route("POST", "/secret/", "", host, None), Err(Refusal::Host), "{host:?}");
        }
        let authority = Some("attacker.example:7000");
        assert_eq!(gate().route("GET", "/secret/", "", HOST, authority), Err(Refusal::Host));
    }

    #[test]
    fn nothing_is_written() {
        for method in ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "get"] {
            assert_eq!(gate().route(method, "/secret/", "", HOST, None), Err(Refusal::Method), "{method}");
        }
    }

    #[test]
    fn paths_of_the_file_system_are_unknown() {
        let paths = [
            "/secret/../../etc/passwd",
            "/secret/..%2f..%2fetc%2fpasswd",
            "/secret/sample/../summary",
            "/secret/sample/+1",
            "/secret/sample/-1",
            "/secret/sample/4294967296",
            "/secret/sample/1/field/a.jpg",
            "/secret/sample/1/field/",
            "/secret/sample/1/field/0/",
            "/secret/sample/1/other/0",
            "/secret/sample/",
            "/secret",
            "/secret//",
        ];
        for path in paths {
            assert_eq!(get(path), Err(Refusal::NotFound), "{path}");
        }
    }

    #[test]
    fn a_query_without_sense_has_a_message() {
        let refused = gate().route("GET", "/secret/samples", "sort=x", HOST, None);
        assert!(matches!(refused, Err(Refusal::Query(message)) if message.contains('x')));
    }
}
